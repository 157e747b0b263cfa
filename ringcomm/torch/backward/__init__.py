"""What every distributed optimizer needs around backward(): hooks, passes and agreement."""

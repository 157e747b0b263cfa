"""`ringcomm check`: gathers the facts about an installation, and judges them."""

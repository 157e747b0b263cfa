"""Messages of ranks besides the collectives: new groups, join(), questions and answers."""

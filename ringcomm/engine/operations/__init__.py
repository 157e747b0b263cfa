"""Each collective checks its arguments and says what is to be done."""

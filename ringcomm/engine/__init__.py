"""Operations of a rank, matched with those of the others. api/ has the public functions."""

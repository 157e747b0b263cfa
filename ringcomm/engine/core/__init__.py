"""Operations of one rank: matched with those of the other ranks, agreed on, carried out."""

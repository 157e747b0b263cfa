"""Operations on arrays of a GPU: their order on its streams, and who watches them."""

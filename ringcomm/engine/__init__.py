"""The collectives of a rank: matched, agreed on, carried out. Contracts are in api/."""

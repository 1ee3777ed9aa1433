"""Models of cost and acceptance, and the profiles they are fitted into."""

"""Step times and acceptance of one engine, measured; and the tables that follow from them."""

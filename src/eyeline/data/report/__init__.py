"""Figures about data, before anything is trained; `recipes/` and `study/` show them."""

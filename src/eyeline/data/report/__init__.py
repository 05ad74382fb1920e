"""What data are, before anything is trained: pure figures; `recipes/` and `study/` show them."""

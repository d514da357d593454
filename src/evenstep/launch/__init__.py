"""Starting processes that train together, and ending them."""

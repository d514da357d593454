"""What is trained: the contract, the built-in tasks, and a user's own."""

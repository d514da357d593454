"""`python -m evenstep`, and `torchrun -m evenstep`."""

from evenstep.cli import main

main()

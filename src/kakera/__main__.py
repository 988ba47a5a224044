"""`python -m kakera`, for environments where the `kakera` script is not on the path."""

from kakera.cli import main

main()

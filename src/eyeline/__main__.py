"""`python -m eyeline` is the same program as `eyeline`."""

from eyeline.cli import main

if __name__ == "__main__":
    main()

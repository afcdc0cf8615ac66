"""`python -m tunix_rt` is the same program as `tunix-rt`."""

from tunix_rt.cli.main import main

if __name__ == "__main__":
    main()

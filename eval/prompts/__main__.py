"""Entry point of `python -m eval.prompts`."""

from eval.prompts import main

main()

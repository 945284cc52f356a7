"""Run one actor: ``python -m history.run ROLE OPTIONS...``. Not in actors itself, which would be two modules then."""

from history.actors import main

if __name__ == "__main__":
    main()

"""The entry point: ``python run.py --config-path DIR --config-name NAME action=run``."""

from flagscale.launch.entry import main

if __name__ == "__main__":
    main()

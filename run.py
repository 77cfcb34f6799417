"""The entry point: ``python run.py --config-path DIR --config-name NAME action=run``."""

from flagscale.launcher.entry import main

if __name__ == "__main__":
    main()

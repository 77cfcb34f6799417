"""The door: ``python run.py --config-path DIR --config-name NAME action=run``. No logic here."""

from flagscale.launch.door import main

if __name__ == "__main__":
    main()

"""What every test can use."""

pytest_plugins = ["bed.plugin"]

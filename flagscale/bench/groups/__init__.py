"""How long process groups take to create, by which way, and what memory they hold."""

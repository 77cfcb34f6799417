"""The page of a run: one HTML file that loads nothing, and what such pages are made of."""

"""The rows of bench/seeds.py."""

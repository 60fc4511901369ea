"""What the papers need besides their objectives. The entry points in pyproject.toml register these
parts, as they register the parts of any installed package. No other package imports this one.
"""

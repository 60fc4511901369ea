"""Lists of several runs beside each other: is what is more relevant higher, and how much is not relevant at all?"""

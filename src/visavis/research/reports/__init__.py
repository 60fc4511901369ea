"""Reports: plots and HTML pages of comparisons, diagnoses, objective profiles and ranked lists."""

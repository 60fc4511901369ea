"""A board of the results of finished runs, from folders that anybody may have written."""

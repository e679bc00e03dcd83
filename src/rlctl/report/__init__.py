"""Reading run directories, and the report of one run or several as a page of its own."""

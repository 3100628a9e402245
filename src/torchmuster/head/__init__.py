"""The head of a run or of a group: it hears agents, decides, and gives the one verdict. Standard library only."""

"""Model cards, and the way weights reach this machine.

shelf = Shelf(home)
entry = pull("smollm2", shelf, report)   # or a path, or hf:org/repo; Entry(card, path)
shelf.find(name), shelf.resolve(name), shelf.entries(), shelf.remove(name)
"""

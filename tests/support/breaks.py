raise RuntimeError("this module\nbreaks")

"""Finding the commonest mistakes in workflows and steps by reading their source. Nothing is imported or run.

`everstep.lint.linting` is where to begin: it reads a file (`module`), finds which functions are workflow code and which
are the bodies of steps (`reach`), and asks the rules, one module for each subject.
"""

"""`fedbuff doctor DIR`: what is wrong with a deployment folder, what may go wrong, and what to change.

Each check looks at one thing and returns findings; none of them changes anything. An error is what will not work, or is not
safe; a warning is what works until it does not.
"""

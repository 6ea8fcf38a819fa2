"""What a run remembers, and how it is shown.

Where things are:

    folder, files, same_data, finished   a run's folder, whole after any kill
    run, compare, terminal, progress     a run as an object, several in a table, on a terminal
    plot                                 SVG, by matplotlib
    pages, digest, groups, tables, figures, html     the report: one HTML file
    live, address                        the same page while a run is under way
    tensorboard, mlflow, scalars         following it there
"""

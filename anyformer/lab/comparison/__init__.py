"""Runs beside each other: settings, learning curves, cost, metrics on the same rows, and rows where they differ.

bootstrap         Paired bootstrap of the difference of two metrics
compare           The comparison of runs
measures          Statistics of a row, and metrics of their sums: accuracy, F1, BLEU, loss per token
page              The comparison as tables, an HTML page and a figure
"""

"""What a trained model can do, with intervals. Read the modules in this order:

systems      a system answers questions; tables of questions and turns
controls     the same with z replaced
oracle       the best choice of modes for each question
intervals    `Estimate`, bootstrap and Wilson intervals, from plain numbers
tables       every table: its columns, the stage that writes it, one reader
statistics   the tables of notebook 06: systems compared, modes against difficulty
ablations    variants of one parameter file beside a reference
"""

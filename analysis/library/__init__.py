"""What the scripts of analysis/ share: runs examined one by one, published studies, and simulated jobs to explain them.

Nothing in the package hpcpace needs it. The scripts import it as `library`, programs in experiments/ as
`analysis.library`: its modules name each other relatively.
"""

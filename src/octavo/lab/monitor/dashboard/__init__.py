"""The dashboard: a local web page that shows runs while they train, and the same page as one file. Needs no torch.

runs     readers of the runs below a folder, or of those named; no other file is opened
verdict  the health of a run, in words
speed    throughput, utilisation, energy and memory
answers  the requests that the page may make, answered as data
packing  arrays as bytes
page     the files of the page, and Plotly's script
server   serves the page on this machine only
report   the page with all answers in one file
"""

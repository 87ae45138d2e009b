"""A local web page that shows runs while they train, and the same page as one file to keep. No torch here.

runs       finds the runs below a folder; nothing else is ever opened
verdict    says in words how a run is
speed      throughput, utilisation, energy and memory
answers    what the page may ask for, as data
packing    arrays as bytes
page       the page's files and Plotly's script
server     answers the page, on this machine only
report     the page with all answers in it
"""

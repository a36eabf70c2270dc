"""Etha and its peers on the same rows, interleaved in one run: ``python bench/peers`` (README.md here).

cases     the rows, and which bytes of which source rank belong where in which target rank
truth     what every element holds, from its index
seat      what an adapter is told, and what it has to offer
rank      one rank of one peer: a process that obeys lines of JSON
contender the runner's end of the ranks of one peer
run       interleaves the contenders, prints the table
etha_bus, gloo, nixl, mooncake, torchstore
          the adapters; only a rank imports the library that an adapter is for
"""

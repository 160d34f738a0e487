"""Rollouts that other frameworks wrote to files, read as rows of this log.

A format is a name, the files it is found in, and a function from one record (a JSON line, a row of
Parquet) to the samples in it. Everything else is common: lines, groups, fidelity, parts and rows.

    find_files(FORMATS["verl"], folder)       which files
    read_file(FORMATS["verl"], path)          record by record: samples, or why there are none
    cut(...)                                  parts: what one commit holds
    part_rows(...)                            the rows of a part

Invariant: what a file becomes is a function of its bytes and of what the importer was told; where
it lies plays no part. Nothing of a file is executed or unpickled.
"""

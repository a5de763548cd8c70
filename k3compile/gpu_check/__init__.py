"""Every Triton kernel held against its op's meaning and timed on a GPU, by one command: ``k3 gpu-check``.

    rooms      arguments laid out anew: on another device, in another dtype, with NaN around them
    exactness  the error rule: against float64, over many draws of an op's samples
    poison     memory that a call has no business with is neither read nor written
    values     data for the calls that are compiled ahead of time
    cells_triton   those calls on a GPU: exact, and how long beside the roofline
    model      the trained tiny model, compiled there, against answers computed here
    run        all of it, as one JSON

The first three serve every implementation, native ones too; tests run them without a GPU.
"""

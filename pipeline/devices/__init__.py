"""A cluster's devices: the control unit's end, the daemon's end, and the messages between them.

A control unit keeps one control stream to each device, and neighbours in a pipeline keep one hop:

    control unit                     device
    LOAD segment's description  ->
                                <-   WANTED blocks that the device lacks
    OPEN                        ->   dials the next device
    PART …: lacking blocks      <->  READY
    BEGIN step                  ->   ACTIVATION and GRADIENT over the hops, as blocks arrive
                                <-   NORMS
    STEP rate, factor           ->
                                <-   PART …: copies of the blocks
                                <-   ALIVE each second, FAILED at an error

``messages`` has their content, ``encoding`` their bytes, ``collapipe.wire.frames`` the kinds of
frames, which the decoder link also uses. A frame's round and epoch name the plan that it belongs
to.
"""

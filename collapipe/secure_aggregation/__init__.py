"""Masked sums: the server learns the sum of the units' updates but no single update.

This is the protocol of Bonawitz et al. (2017), "Practical Secure Aggregation for Privacy-Preserving
Machine Learning", with its consistency check. It uses pairwise masks with Shamir shares. In each
round a unit goes through five steps:

1. It makes two key pairs and sends the public keys (``UnitWithKeys``), signed if it has
   credentials.

2. It receives all units' public keys. It sends shares of its mask key and of its self mask's seed
   through the server, sealed for each other unit (``UnitWithShares``). Or it names the units whose
   keys it refuses; those that remain then begin again at step 1, once.

3. It sends its quantised update plus its self mask, plus or minus a mask for each other unit
   (``MaskedUnit``).

4. It receives the list of survivors, the units whose updates arrived. It confirms the list to each
   survivor with the keys of step 1 (``UnitWithSurvivors``).

5. It receives the survivors' confirmations. If enough of them confirm the same list, it reveals its
   share of each survivor's seed and of each other unit's mask key. It never reveals both shares of
   one unit.

``session`` proves what a dishonest server can learn. The proof needs units that can verify the
owners of public keys (``privacy.peers``). Without ``privacy.peers`` a server could impersonate all
other units; then the sum hides an update only from a server that follows the protocol.

Each stage is an object that the next stage replaces, so no request can be repeated. This package
does not depend on Flower.
"""

"""Sums of units' updates that show nobody a single one: pairwise masks with Shamir shares.

The protocol of Bonawitz et al. (2017), "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", for a server that follows it and is curious; from 20 units on with the sparse graph of
Bell et al. (2020), "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead". A round has
four messages:

1. each unit makes two pairs of keys and tells the public ones (``UnitWithKeys``), signed where it
   has credentials;
2. it gets everybody's, and sends shares of its mask key and of its self mask's seed, sealed for its
   neighbours, by way of the server (``UnitWithShares``);
3. it sends its quantised update plus its self mask, plus or minus a mask for each pair of
   neighbours (``MaskedUnit``);
4. it learns whose updates came, and tells its share of the seed of each of these neighbours, or of
   the mask key of each that is gone: never both of one unit.

A stage is an object that the next one takes the place of, so that nothing can be asked twice.
Nothing here knows of Flower.
"""

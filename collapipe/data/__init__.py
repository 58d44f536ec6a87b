"""Where rows come from and whose they are: folders, files, the hub; splits and shards."""

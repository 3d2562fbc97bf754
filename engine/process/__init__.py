"""How processes watch and outlive each other."""

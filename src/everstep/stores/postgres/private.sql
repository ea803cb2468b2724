-- A schema that we have made is for roles that were given rights by name. Default privileges of the role may have given it
-- away as it was made.

REVOKE ALL ON SCHEMA everstep FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA everstep FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA everstep FROM PUBLIC;

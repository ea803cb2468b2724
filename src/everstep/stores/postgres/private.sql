-- A schema that we have made is for roles that get rights by name. Default privileges of the role may have granted it to
-- others as it was made.

REVOKE ALL ON SCHEMA everstep FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA everstep FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA everstep FROM PUBLIC;

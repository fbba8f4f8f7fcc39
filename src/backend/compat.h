/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  What differs between the PostgreSQL versions we build for, 15 to 18.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_COMPAT_H
#define RUSTSTREAM_COMPAT_H

#include "miscadmin.h"
#include "pgstat.h"
#include "utils/acl.h"
#include "utils/wait_event.h"

#if PG_VERSION_NUM < 150000
#error "ruststream needs PostgreSQL 15 or later"
#endif

/* PostgreSQL 16 folded the per-catalog permission checks into two functions. */
#if PG_VERSION_NUM < 160000
#define rs_class_ownercheck(relid, roleid) pg_class_ownercheck(relid, roleid)
#define rs_proc_aclcheck(procid, roleid, mode) pg_proc_aclcheck(procid, roleid, mode)
#define rs_database_aclcheck(dbid, roleid, mode) pg_database_aclcheck(dbid, roleid, mode)
#define rs_database_ownercheck(dbid, roleid) pg_database_ownercheck(dbid, roleid)
#define rs_namespace_aclcheck(nspid, roleid, mode) pg_namespace_aclcheck(nspid, roleid, mode)
#define rs_extension_ownercheck(extid, roleid) pg_extension_ownercheck(extid, roleid)
#else
#include "catalog/pg_class_d.h"
#include "catalog/pg_database_d.h"
#include "catalog/pg_extension_d.h"
#include "catalog/pg_namespace_d.h"
#include "catalog/pg_proc_d.h"
#include "varatt.h"

#define rs_class_ownercheck(relid, roleid) object_ownercheck(RelationRelationId, relid, roleid)
#define rs_proc_aclcheck(procid, roleid, mode)                                                     \
	object_aclcheck(ProcedureRelationId, procid, roleid, mode)
#define rs_database_aclcheck(dbid, roleid, mode)                                                   \
	object_aclcheck(DatabaseRelationId, dbid, roleid, mode)
#define rs_database_ownercheck(dbid, roleid) object_ownercheck(DatabaseRelationId, dbid, roleid)
#define rs_namespace_aclcheck(nspid, roleid, mode)                                                 \
	object_aclcheck(NamespaceRelationId, nspid, roleid, mode)
#define rs_extension_ownercheck(extid, roleid) object_ownercheck(ExtensionRelationId, extid, roleid)
#endif

/* PostgreSQL 17 taught LockHeldByMe about stronger modes. */
#if PG_VERSION_NUM < 170000
#define rs_lock_held_by_me(tag, mode) LockHeldByMe(tag, mode)
#else
#define rs_lock_held_by_me(tag, mode) LockHeldByMe(tag, mode, false)
#endif

#endif /* RUSTSTREAM_COMPAT_H */

//! Roles and bindings indexed for authorization: bindings by subject, rules parsed.
//!
//! Updated incrementally. A binding references the entry of its role, which exists before the role
//! and outlives it. So a role can be created, changed and deleted without touching its bindings.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use api::field::quote;
use api::json::JsonExt as _;
use parking_lot::RwLock;
use serde_json::Value;

use super::Attributes;
use super::rule::PolicyRule;
use crate::access::User;

#[derive(Default)]
pub struct RbacIndex {
    roles: HashMap<RoleKey, Arc<RoleEntry>>,
    /// By namespace; `""` holds the ClusterRoleBindings.
    scopes: HashMap<String, NamespaceBindings>,
}

/// The namespace (`""` for a ClusterRole) and the name.
type RoleKey = (String, String);

/// Bindings by user name or group name.
type SubjectIndex = HashMap<String, Vec<Arc<Binding>>>;

#[derive(Default)]
struct NamespaceBindings {
    bindings: HashMap<String, Arc<Binding>>,
    users: SubjectIndex,
    groups: SubjectIndex,
}

/// The entry of a role, whether or not the role exists.
struct RoleEntry {
    key: RoleKey,
    /// A Bloom filter of the resources in the rules: if a request's bit is clear, no rule can
    /// match.
    mask: AtomicU64,
    rules: RwLock<Option<Arc<[PolicyRule]>>>,
}

pub struct Binding {
    name: String,
    /// `""` for a ClusterRoleBinding.
    namespace: String,
    subjects: Vec<Subject>,
    role_kind: String,
    role_name: String,
    /// `None` for an unknown kind of role.
    role: Option<Arc<RoleEntry>>,
}

struct Subject {
    kind: String,
    name: String,
    /// The namespace of a ServiceAccount.
    namespace: String,
}

/// The resolved rules of a user, and the errors while resolving them.
#[derive(Default)]
pub struct ResolvedRules {
    pub rules: Vec<PolicyRule>,
    pub errors: Vec<String>,
}

impl RbacIndex {
    pub fn put_role(&mut self, namespace: &str, name: &str, role: &Value) {
        let rules = PolicyRule::all_of(role);
        let entry = self.role_entry(namespace, name);
        entry.mask.store(mask_of(&rules), Ordering::Relaxed);
        *entry.rules.write() = Some(rules.into());
    }

    pub fn remove_role(&mut self, namespace: &str, name: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        if let Some(entry) = self.roles.get(&key) {
            entry.mask.store(0, Ordering::Relaxed);
            *entry.rules.write() = None;
        }
        self.remove_unused(&key);
    }

    pub fn put_binding(&mut self, namespace: &str, name: &str, value: &Value) {
        self.remove_binding(namespace, name);
        let reference = value.at("roleRef");
        let role = match reference.text("kind") {
            "Role" => Some(self.role_entry(namespace, reference.text("name"))),
            "ClusterRole" => Some(self.role_entry("", reference.text("name"))),
            _ => None,
        };
        let subject = |value: &Value| Subject {
            kind: value.text("kind").to_owned(),
            name: value.text("name").to_owned(),
            namespace: match value.text("namespace") {
                "" => namespace.to_owned(),
                other => other.to_owned(),
            },
        };
        let binding = Arc::new(Binding {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            subjects: value.items("subjects").iter().map(subject).collect(),
            role_kind: reference.text("kind").to_owned(),
            role_name: reference.text("name").to_owned(),
            role,
        });
        let scope = self.scopes.entry(namespace.to_owned()).or_default();
        for subject in &binding.subjects {
            let Some((index, key)) = scope.index(subject) else { continue };
            let list = index.entry(key).or_default();
            if !list.iter().any(|other| Arc::ptr_eq(other, &binding)) {
                list.push(binding.clone());
            }
        }
        scope.bindings.insert(name.to_owned(), binding);
    }

    pub fn remove_binding(&mut self, namespace: &str, name: &str) {
        let Some(scope) = self.scopes.get_mut(namespace) else { return };
        let Some(binding) = scope.bindings.remove(name) else { return };
        for subject in &binding.subjects {
            let Some((index, key)) = scope.index(subject) else { continue };
            if let Some(list) = index.get_mut(&key) {
                list.retain(|other| !Arc::ptr_eq(other, &binding));
                if list.is_empty() {
                    index.remove(&key);
                }
            }
        }
        if scope.bindings.is_empty() {
            self.scopes.remove(namespace);
        }
        let key = binding.role.as_ref().map(|entry| entry.key.clone());
        drop(binding);
        if let Some(key) = key {
            self.remove_unused(&key);
        }
    }

    fn role_entry(&mut self, namespace: &str, name: &str) -> Arc<RoleEntry> {
        let key = (namespace.to_owned(), name.to_owned());
        let new =
            || Arc::new(RoleEntry { key: key.clone(), mask: AtomicU64::new(0), rules: RwLock::new(None) });
        self.roles.entry(key.clone()).or_insert_with(new).clone()
    }

    /// Removes an entry without a role once its last binding is gone.
    fn remove_unused(&mut self, key: &RoleKey) {
        // Only the map references the entry: no binding does.
        let unused = |entry: &Arc<RoleEntry>| Arc::strong_count(entry) == 1 && entry.rules.read().is_none();
        if self.roles.get(key).is_some_and(unused) {
            self.roles.remove(key);
        }
    }

    /// The binding that allows the request, or the errors while resolving rules.
    pub fn find_binding(
        &self,
        user: &User,
        attributes: &Attributes<'_>,
    ) -> Result<Arc<Binding>, Vec<String>> {
        let bit = attributes.bit();
        for binding in self.bindings(user, attributes.namespace()) {
            let Some(entry) = &binding.role else { continue };
            if entry.mask.load(Ordering::Relaxed) & bit == 0 {
                continue;
            }
            if entry.rules.read().iter().flat_map(|rules| rules.iter()).any(|rule| rule.allows(attributes)) {
                return Ok(binding.clone());
            }
        }
        Err(self.resolution_errors(user, attributes.namespace()))
    }

    /// All rules that `user` has in `namespace`.
    pub fn resolve_rules(&self, user: &User, namespace: &str) -> ResolvedRules {
        let mut resolved = ResolvedRules::default();
        for binding in self.sorted_bindings(user, namespace) {
            match binding.rules() {
                Ok(rules) => resolved.rules.extend_from_slice(&rules),
                Err(error) => resolved.errors.push(error),
            }
        }
        resolved
    }

    /// The rules of a role; `None` if the role does not exist.
    pub fn rules_of(&self, namespace: &str, name: &str) -> Option<Arc<[PolicyRule]>> {
        self.roles.get(&(namespace.to_owned(), name.to_owned())).and_then(|entry| entry.rules.read().clone())
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.roles.is_empty() && self.scopes.is_empty()
    }

    fn resolution_errors(&self, user: &User, namespace: &str) -> Vec<String> {
        self.sorted_bindings(user, namespace).iter().filter_map(|binding| binding.rules().err()).collect()
    }

    /// The bindings that apply to a user; one may occur several times.
    fn bindings<'a>(&'a self, user: &'a User, namespace: &'a str) -> impl Iterator<Item = &'a Arc<Binding>> {
        let cluster = self.scopes.get("");
        let local = if namespace.is_empty() { None } else { self.scopes.get(namespace) };
        cluster.into_iter().chain(local).flat_map(move |scope| {
            let users = scope.users.get(&user.name);
            let groups = user.groups.iter().filter_map(move |group| scope.groups.get(group));
            users.into_iter().chain(groups).flatten()
        })
    }

    /// The distinct bindings that apply to a user: cluster-wide ones first, then by name.
    fn sorted_bindings<'a>(&'a self, user: &'a User, namespace: &'a str) -> Vec<&'a Arc<Binding>> {
        let mut all: Vec<&Arc<Binding>> = self.bindings(user, namespace).collect();
        all.sort_by_key(|binding| (&binding.namespace, &binding.name));
        all.dedup_by(|one, other| Arc::ptr_eq(one, other));
        all
    }
}

impl NamespaceBindings {
    /// The index and key of a subject.
    fn index(&mut self, subject: &Subject) -> Option<(&mut SubjectIndex, String)> {
        match subject.kind.as_str() {
            "User" => Some((&mut self.users, subject.name.clone())),
            "Group" => Some((&mut self.groups, subject.name.clone())),
            "ServiceAccount" if !subject.namespace.is_empty() => {
                Some((&mut self.users, subject.service_account_user()))
            }
            _ => None,
        }
    }
}

impl Binding {
    fn rules(&self) -> Result<Arc<[PolicyRule]>, String> {
        let Some(entry) = &self.role else {
            return Err(format!("unsupported role reference kind: {}", quote(&self.role_kind)));
        };
        entry.rules.read().clone().ok_or_else(|| {
            let kind = self.role_kind.to_ascii_lowercase();
            format!("{kind}.rbac.authorization.k8s.io {} not found", quote(&self.role_name))
        })
    }

    /// Why this binding applies to `user`: `ClusterRoleBinding "x" of ClusterRole "y" to User "z"`.
    pub fn describe(&self, user: &User) -> String {
        let (kind, name) = match self.namespace.as_str() {
            "" => ("ClusterRoleBinding", self.name.clone()),
            namespace => ("RoleBinding", format!("{}/{namespace}", self.name)),
        };
        let subject = match self.subjects.iter().find(|subject| subject.matches_user(user)) {
            Some(subject) if subject.kind == "ServiceAccount" => {
                let name = format!("{}/{}", subject.name, subject.namespace);
                format!("ServiceAccount {}", quote(&name))
            }
            Some(subject) => format!("{} {}", subject.kind, quote(&subject.name)),
            None => String::new(),
        };
        format!("{kind} {} of {} {} to {subject}", quote(&name), self.role_kind, quote(&self.role_name))
    }
}

impl Subject {
    fn service_account_user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }

    fn matches_user(&self, user: &User) -> bool {
        match self.kind.as_str() {
            "User" => user.name == self.name,
            "Group" => user.groups.contains(&self.name),
            _ => !self.namespace.is_empty() && user.name == self.service_account_user(),
        }
    }
}

/// Set if a rule has non-resource URLs.
const NON_RESOURCE_BIT: u64 = 1 << 63;

impl Attributes<'_> {
    fn bit(&self) -> u64 {
        match self {
            Attributes::Resource { resource, .. } => resource_bit(resource),
            Attributes::Path { .. } => NON_RESOURCE_BIT,
        }
    }
}

fn mask_of(rules: &[PolicyRule]) -> u64 {
    let of = |rule: &PolicyRule| {
        let resources = rule.resources.iter().map(|resource| match resource.split('/').next() {
            None | Some("*") => !NON_RESOURCE_BIT,
            Some(resource) => resource_bit(resource),
        });
        let paths = if rule.urls.is_empty() { 0 } else { NON_RESOURCE_BIT };
        resources.fold(paths, |mask, bit| mask | bit)
    };
    rules.iter().map(of).fold(0, |mask, bits| mask | bits)
}

/// One of the lower 63 bits.
fn resource_bit(resource: &str) -> u64 {
    1 << (BuildHasherDefault::<DefaultHasher>::default().hash_one(resource) % 63)
}

//! Generates the operations of all paths, for both versions of OpenAPI.

use std::collections::BTreeMap;

use api::Resource;
use api::resource_table::{Subresource, Verbs};
use schema::kubernetes;
use schema::openapi::Definitions;

use super::parameters::{Parameter, Parameters};

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

pub const JSON_MEDIA_TYPE: &[&str] = &["application/json"];
pub const BODY_MEDIA_TYPES: &[&str] =
    &["application/json", "application/yaml", "application/vnd.kubernetes.protobuf"];
pub const STREAM_MEDIA_TYPES: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
    "application/json;stream=watch",
    "application/vnd.kubernetes.protobuf;stream=watch",
];
const LOG_MEDIA_TYPES: &[&str] =
    &["text/plain", "application/json", "application/yaml", "application/vnd.kubernetes.protobuf"];
const CUSTOM_RESOURCE_MEDIA_TYPES: &[&str] = &["application/json", "application/yaml"];
const CUSTOM_RESOURCE_PATCH_MEDIA_TYPES: &[&str] =
    &["application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml"];
const PATCH_MEDIA_TYPES: &[&str] = &[
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
];
const ANY_MEDIA_TYPE: &[&str] = &["*/*"];

/// The resources whose deletion returns the object; all others return a `Status`. Fixed for
/// compatibility upstream.
const DELETE_RETURNS_OBJECT: &[&str] = &[
    "CSIDriver",
    "CSINode",
    "DeviceClass",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "Pod",
    "PodTemplate",
    "ResourceClaim",
    "ResourceClaimTemplate",
    "ResourceQuota",
    "ResourceSlice",
    "Service",
    "ServiceAccount",
    "StorageClass",
    "VolumeAttachment",
    "VolumeAttributesClass",
];

/// Operations by path, in the order they were added.
pub type Paths = BTreeMap<String, Vec<Operation>>;

#[derive(Clone, Debug)]
pub struct Operation {
    pub method: &'static str,
    pub id: String,
    pub description: String,
    pub tag: String,
    pub consumes: &'static [&'static str],
    pub produces: &'static [&'static str],
    pub parameters: Vec<Parameter>,
    /// The definition of the body, and whether it is required.
    pub body: Option<(String, bool)>,
    pub responses: Vec<(u16, ResponseSchema)>,
    pub action: Option<&'static str>,
    /// Group, version and kind.
    pub kind: Option<(String, String, String)>,
}

#[derive(Clone, Debug)]
pub enum ResponseSchema {
    Definition(String),
    Text,
}

/// All operations of these rows.
pub fn paths(rows: &[&'static Resource], definitions: &Definitions) -> Paths {
    let parameters = Parameters { definitions };
    let mut paths = Paths::new();
    add_root("/api/", "getCoreAPIVersions", "get available API versions", "core", "APIVersions", &mut paths);
    add_root("/apis/", "getAPIVersions", "get available API versions", "apis", "APIGroupList", &mut paths);
    let mut version =
        discovery("getCodeVersion", "get the version information for this server", "version", "");
    version.consumes = JSON_MEDIA_TYPE;
    version.produces = JSON_MEDIA_TYPE;
    version.responses =
        vec![(200, ResponseSchema::Definition("io.k8s.apimachinery.pkg.version.Info".into()))];
    paths.insert("/version/".into(), vec![version]);
    for row in rows {
        let names = GroupVersionNames::new(row);
        if !row.group.is_empty() {
            let id = format!("get{}APIGroup", names.group);
            let path = format!("/apis/{}/", row.group);
            add_root(&path, &id, "get information of a group", &names.group_tag(), "APIGroup", &mut paths);
        }
        let id = format!("get{}{}APIResources", names.group, names.version);
        let path = format!("{}/", names.base);
        add_root(&path, &id, "get available resources", &names.tag(), "APIResourceList", &mut paths);
        OperationBuilder { row, names, parameters: &parameters, paths: &mut paths }.resource();
    }
    paths
}

fn add_root(path: &str, id: &str, description: &str, tag: &str, answer: &str, paths: &mut Paths) {
    paths.entry(path.into()).or_insert_with(|| vec![discovery(id, description, tag, answer)]);
}

fn discovery(id: &str, description: &str, tag: &str, answer: &str) -> Operation {
    Operation {
        method: "get",
        id: id.into(),
        description: description.into(),
        tag: tag.into(),
        consumes: BODY_MEDIA_TYPES,
        produces: BODY_MEDIA_TYPES,
        parameters: Vec::new(),
        body: None,
        responses: vec![(200, ResponseSchema::Definition(format!("{META}.{answer}")))],
        action: None,
        kind: None,
    }
}

/// A row's group and version as spelled in paths, operation IDs and tags.
struct GroupVersionNames {
    base: String,
    group: String,
    version: String,
}

impl GroupVersionNames {
    fn new(row: &Resource) -> GroupVersionNames {
        let base = match row.group {
            "" => format!("/api/{}", row.version),
            group => format!("/apis/{group}/{}", row.version),
        };
        // Drops the common suffix: `rbac.authorization.k8s.io` becomes `RbacAuthorization`.
        let group = match row.group.strip_suffix(".k8s.io").unwrap_or(row.group) {
            "" => "Core".to_owned(),
            group => group.split('.').map(to_upper_first).collect(),
        };
        GroupVersionNames { base, group, version: to_upper_first(row.version) }
    }

    fn group_tag(&self) -> String {
        self.group[..1].to_lowercase() + &self.group[1..]
    }

    fn tag(&self) -> String {
        format!("{}_{}", self.group_tag(), self.version.to_lowercase())
    }
}

fn to_upper_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

struct OperationBuilder<'b> {
    row: &'static Resource,
    names: GroupVersionNames,
    parameters: &'b Parameters<'b>,
    paths: &'b mut Paths,
}

impl OperationBuilder<'_> {
    fn resource(mut self) {
        let row = self.row;
        let base = self.names.base.clone();
        let scope = if row.namespaced { "/namespaces/{namespace}" } else { "" };
        let collection = format!("{base}{scope}/{}", row.plural);
        let item = format!("{collection}/{{name}}");
        let can_watch = matches!(row.verbs, Verbs::All | Verbs::NoDeleteCollection);
        match row.verbs {
            Verbs::CreateOnly => self.create(&collection),
            Verbs::GetList => {
                self.list(&collection, false, can_watch);
                self.get(&item);
            }
            Verbs::All | Verbs::NoDeleteCollection => {
                self.list(&collection, false, can_watch);
                self.create(&collection);
                if row.verbs == Verbs::All {
                    self.delete_collection(&collection);
                }
                self.get(&item);
                self.put(&item);
                self.delete(&item);
                self.patch(&item);
            }
        }
        let has_watch_path = can_watch && row.custom.is_none();
        if has_watch_path {
            self.watch(&format!("{base}/watch{scope}/{}", row.plural), "watchlist", false);
            self.watch(&format!("{base}/watch{scope}/{}/{{name}}", row.plural), "watch", false);
        }
        if can_watch && row.namespaced {
            self.list(&format!("{base}/{}", row.plural), true, can_watch);
        }
        if has_watch_path && row.namespaced {
            self.watch(&format!("{base}/watch/{}", row.plural), "watchlist", true);
        }
        for sub in row.subresources {
            self.subresource(&format!("{item}/{}", sub.name), sub);
        }
    }

    /// An operation on the resource itself; `verb` and `suffix` enclose the kind in its ID.
    fn operation(
        &self,
        method: &'static str,
        action: &'static str,
        (verb, suffix): (&str, &str),
        all_namespaces: bool,
    ) -> Operation {
        let row = self.row;
        let scope = if row.namespaced && !all_namespaces { "Namespaced" } else { "" };
        let mut parameters = vec![Parameters::pretty()];
        if row.namespaced && !all_namespaces {
            parameters.push(Parameters::namespace());
        }
        let collection = if action == "deletecollection" { "Collection" } else { "" };
        Operation {
            method,
            id: format!(
                "{verb}{}{}{collection}{scope}{}{suffix}",
                self.names.group, self.names.version, row.kind
            ),
            description: String::new(),
            tag: self.names.tag(),
            consumes: ANY_MEDIA_TYPE,
            produces: BODY_MEDIA_TYPES,
            parameters,
            body: None,
            responses: Vec::new(),
            action: Some(action),
            kind: Some((row.group.into(), row.version.into(), row.kind.into())),
        }
    }

    fn add(&mut self, path: &str, mut operation: Operation) {
        if self.row.custom.is_some() {
            operation.produces = CUSTOM_RESOURCE_MEDIA_TYPES;
            operation.consumes = if operation.method == "patch" {
                CUSTOM_RESOURCE_PATCH_MEDIA_TYPES
            } else {
                CUSTOM_RESOURCE_MEDIA_TYPES
            };
            // Upstream documents only 200 for patches of custom resources.
            if operation.method == "patch" {
                operation.responses.truncate(1);
            }
        }
        self.paths.entry(path.to_owned()).or_default().push(operation);
    }

    fn definition(&self) -> String {
        definition_of(self.row, self.row.kind)
    }

    fn list(&mut self, path: &str, all_namespaces: bool, can_watch: bool) {
        let suffix = if all_namespaces { "ForAllNamespaces" } else { "" };
        let mut operation = self.operation("get", "list", ("list", suffix), all_namespaces);
        let verb = if can_watch && self.row.custom.is_none() { "list or watch" } else { "list" };
        operation.description = format!("{verb} objects of kind {}", self.row.kind);
        operation.produces = STREAM_MEDIA_TYPES;
        operation.parameters.extend(self.parameters.list());
        let list = definition_of(self.row, &self.row.list_kind());
        operation.responses = vec![(200, ResponseSchema::Definition(list))];
        self.add(path, operation);
    }

    fn create(&mut self, path: &str) {
        let mut operation = self.operation("post", "post", ("create", ""), false);
        operation.description = format!("create{}{}", a_or_an(self.row.kind), self.row.kind);
        operation.parameters.extend(self.parameters.create());
        operation.body = Some((self.definition(), true));
        operation.responses = schema_responses(&[200, 201, 202], &self.definition());
        self.add(path, operation);
    }

    fn delete_collection(&mut self, path: &str) {
        let mut operation = self.operation("delete", "deletecollection", ("delete", ""), false);
        operation.description = format!("delete collection of {}", self.row.kind);
        operation.parameters.extend(self.parameters.delete_collection());
        operation.body = Some((format!("{META}.DeleteOptions"), false));
        operation.responses = schema_responses(&[200], &format!("{META}.Status"));
        self.add(path, operation);
    }

    fn get(&mut self, path: &str) {
        let mut operation = self.operation("get", "get", ("read", ""), false);
        operation.description = format!("read the specified {}", self.row.kind);
        operation.parameters.push(Parameters::name_of(self.row.kind));
        operation.responses = schema_responses(&[200], &self.definition());
        self.add(path, operation);
    }

    fn put(&mut self, path: &str) {
        let mut operation = self.operation("put", "put", ("replace", ""), false);
        operation.description = format!("replace the specified {}", self.row.kind);
        operation.parameters.push(Parameters::name_of(self.row.kind));
        operation.parameters.extend(self.parameters.update());
        operation.body = Some((self.definition(), true));
        operation.responses = schema_responses(&[200, 201], &self.definition());
        self.add(path, operation);
    }

    fn patch(&mut self, path: &str) {
        let mut operation = self.operation("patch", "patch", ("patch", ""), false);
        operation.description = format!("partially update the specified {}", self.row.kind);
        operation.consumes = PATCH_MEDIA_TYPES;
        operation.parameters.push(Parameters::name_of(self.row.kind));
        operation.parameters.extend(self.parameters.patch());
        operation.body = Some((format!("{META}.Patch"), true));
        operation.responses = schema_responses(&[200, 201], &self.definition());
        self.add(path, operation);
    }

    fn delete(&mut self, path: &str) {
        let mut operation = self.operation("delete", "delete", ("delete", ""), false);
        operation.description = format!("delete{}{}", a_or_an(self.row.kind), self.row.kind);
        operation.parameters.push(Parameters::name_of(self.row.kind));
        operation.parameters.extend(self.parameters.delete());
        operation.body = Some((format!("{META}.DeleteOptions"), false));
        let answer = match DELETE_RETURNS_OBJECT.contains(&self.row.kind) {
            true => self.definition(),
            false => format!("{META}.Status"),
        };
        operation.responses = schema_responses(&[200, 202], &answer);
        self.add(path, operation);
    }

    fn watch(&mut self, path: &str, action: &'static str, all_namespaces: bool) {
        let suffix = match (action, all_namespaces) {
            ("watchlist", true) => "ListForAllNamespaces",
            ("watchlist", false) => "List",
            _ => "",
        };
        let mut operation = self.operation("get", action, ("watch", suffix), all_namespaces);
        operation.description = match action {
            "watchlist" => format!(
                "watch individual changes to a list of {}. deprecated: use the 'watch' parameter with a list \
                 operation instead.",
                self.row.kind
            ),
            _ => format!(
                "watch changes to an object of kind {}. deprecated: use the 'watch' parameter with a list \
                 operation instead, filtered to a single item with the 'fieldSelector' parameter.",
                self.row.kind
            ),
        };
        operation.produces = STREAM_MEDIA_TYPES;
        operation.parameters.extend(self.parameters.list());
        if action == "watch" {
            operation.parameters.push(Parameters::name_of(self.row.kind));
        }
        operation.responses = schema_responses(&[200], &format!("{META}.WatchEvent"));
        self.add(path, operation);
    }

    fn subresource(&mut self, path: &str, sub: &Subresource) {
        if sub.kind.ends_with("Options") {
            return self.connect(path, sub);
        }
        for verb in sub.verbs {
            let operation = self.sub_operation(sub, verb);
            self.add(path, operation);
        }
    }

    fn sub_operation(&self, sub: &Subresource, verb: &str) -> Operation {
        let (owner, name) = (self.row.kind, sub.name);
        let kind = if sub.kind.is_empty() { owner } else { sub.kind };
        let (group, version) = sub.group_version.unwrap_or((self.row.group, self.row.version));
        let definition = match sub.group_version {
            Some((group, version)) => definition(group, version, kind),
            None => definition_of(self.row, kind),
        };
        let suffix = to_upper_first(name);
        let mut operation = match verb {
            "get" => self.operation("get", "get", ("read", &suffix), false),
            "update" => self.operation("put", "put", ("replace", &suffix), false),
            "patch" => self.operation("patch", "patch", ("patch", &suffix), false),
            _ => self.operation("post", "post", ("create", &suffix), false),
        };
        operation.kind = Some((group.into(), version.into(), kind.into()));
        operation.parameters.push(Parameters::name_of(kind));
        let (description, body, codes): (_, _, &[u16]) = match verb {
            "get" => (format!("read {name} of the specified {owner}"), None, &[200]),
            "update" => {
                operation.parameters.extend(self.parameters.update());
                (format!("replace {name} of the specified {owner}"), Some(definition.clone()), &[200, 201])
            }
            "patch" => {
                operation.parameters.extend(self.parameters.patch());
                operation.consumes = PATCH_MEDIA_TYPES;
                let body = format!("{META}.Patch");
                (format!("partially update {name} of the specified {owner}"), Some(body), &[200, 201])
            }
            _ => {
                operation.parameters.extend(self.parameters.create());
                let description = format!("create {name} of{}{owner}", a_or_an(owner));
                (description, Some(definition.clone()), &[200, 201, 202])
            }
        };
        operation.description = description;
        operation.body = body.map(|body| (body, true));
        operation.responses = schema_responses(codes, &definition);
        if name == "log" {
            operation.produces = LOG_MEDIA_TYPES;
            operation.responses = vec![(200, ResponseSchema::Text)];
            operation.parameters.extend(self.parameters.options("io.k8s.api.core.v1.PodLogOptions"));
        }
        operation
    }

    fn connect(&mut self, path: &str, sub: &Subresource) {
        let methods: &[&'static str] = match sub.name {
            "proxy" => &["get", "put", "post", "delete", "options", "head", "patch"],
            _ => &["get", "post"],
        };
        for method in methods {
            let operation = self.connect_operation(method, sub, "");
            self.add(path, operation);
            if sub.name == "proxy" {
                let mut operation = self.connect_operation(method, sub, "WithPath");
                operation.parameters.push(Parameters::proxy_path());
                self.add(&format!("{path}/{{path}}"), operation);
            }
        }
    }

    fn connect_operation(&self, method: &'static str, sub: &Subresource, suffix: &str) -> Operation {
        let suffix = format!("{}{suffix}", to_upper_first(sub.name));
        let mut operation = self.operation(method, "connect", ("connect", &suffix), false);
        // The method follows the version in the operation ID. 7 is the length of `connect`.
        let (prefix, rest) = operation.id.split_at(7 + self.names.group.len() + self.names.version.len());
        operation.id = format!("{prefix}{}{rest}", to_upper_first(method));
        operation.description =
            format!("connect {} requests to {} of {}", method.to_uppercase(), sub.name, self.row.kind);
        operation.produces = ANY_MEDIA_TYPE;
        operation.parameters.retain(|parameter| parameter.name != "pretty");
        operation.parameters.push(Parameters::name_of(sub.kind));
        let options = definition(self.row.group, self.row.version, sub.kind);
        operation.parameters.extend(self.parameters.options(&options));
        operation.kind = Some((self.row.group.into(), self.row.version.into(), sub.kind.into()));
        operation.responses = vec![(200, ResponseSchema::Text)];
        operation
    }
}

fn schema_responses(codes: &[u16], definition: &str) -> Vec<(u16, ResponseSchema)> {
    codes.iter().map(|code| (*code, ResponseSchema::Definition(definition.to_owned()))).collect()
}

/// The definition name of a row's kind or of its list.
pub fn definition_of(row: &Resource, kind: &str) -> String {
    if row.custom.is_none() {
        return definition(row.group, row.version, kind);
    }
    let group: Vec<&str> = row.group.split('.').rev().collect();
    format!("{}.{}.{kind}", group.join("."), row.version)
}

/// The definition name of a built-in kind.
fn definition(group: &str, version: &str, kind: &str) -> String {
    match kubernetes().type_by_kind(group, version, kind) {
        Some(id) => kubernetes().get(id).name.to_string(),
        None => String::new(),
    }
}

/// The article between spaces; plurals have none.
fn a_or_an(noun: &str) -> &'static str {
    match noun.chars().next() {
        _ if noun.ends_with('s') && !noun.ends_with("ss") => " ",
        Some('A' | 'E' | 'I' | 'O' | 'U') => " an ",
        _ => " a ",
    }
}

/// The description of a response code.
pub fn status_reason(code: u16) -> &'static str {
    match code {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        _ => "Unauthorized",
    }
}

/// Moves the parameters that all operations of a path share to the path. Both lists end up sorted.
pub fn take_shared_parameters(operations: &mut [Operation]) -> Vec<Parameter> {
    let key = |parameter: &Parameter| (parameter.name.clone(), parameter.location);
    let mut shared: Vec<Parameter> =
        operations.first().map(|first| first.parameters.clone()).unwrap_or_default();
    shared.retain(|candidate| {
        operations
            .iter()
            .all(|operation| operation.parameters.iter().any(|found| key(found) == key(candidate)))
    });
    for operation in operations {
        operation.parameters.retain(|parameter| !shared.iter().any(|common| key(common) == key(parameter)));
        operation.parameters.sort_by_key(key);
    }
    shared.sort_by_key(key);
    shared
}

//! API discovery, for controllers that work on kinds known at run time only.

use futures_util::stream::{StreamExt as _, iter};
use serde::Deserialize;

use crate::{Client, Error, Key};

/// The limit of concurrent requests.
const MAX_CONCURRENT_REQUESTS: usize = 8;

/// A kind in one version of its API group.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ApiResource {
    /// `""` for the core group.
    pub group: String,
    pub version: String,
    pub kind: String,
    pub plural: String,
    pub namespaced: bool,
    pub verbs: Vec<String>,
    /// Whether this is the preferred version of the kind. Each kind has one.
    pub preferred: bool,
}

/// The result of discovery, possibly partial.
#[derive(Debug, Default)]
pub struct ServerResources {
    pub kinds: Vec<ApiResource>,
    /// Group versions whose discovery failed, such as those of an unavailable aggregated API
    /// server.
    pub failed: Vec<(String, Error)>,
}

impl ApiResource {
    /// `apps/v1`, or `v1` for the core group.
    pub fn api_version(&self) -> String {
        match self.group.as_str() {
            "" => self.version.clone(),
            group => format!("{group}/{}", self.version),
        }
    }

    pub fn supports_verb(&self, verb: &str) -> bool {
        self.verbs.iter().any(|known| known == verb)
    }

    /// The path of the collection, in one namespace unless `namespace` is `""`.
    pub fn collection(&self, namespace: &str) -> String {
        let root = if self.group.is_empty() { "/api" } else { "/apis" };
        let (version, plural) = (self.api_version(), &self.plural);
        match self.namespaced && !namespace.is_empty() {
            true => format!("{root}/{version}/namespaces/{namespace}/{plural}"),
            false => format!("{root}/{version}/{plural}"),
        }
    }

    /// The path of one object.
    pub fn object(&self, key: &Key) -> String {
        format!("{}/{}", self.collection(&key.namespace), key.name)
    }
}

#[derive(Deserialize)]
struct Groups {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Group {
    name: String,
    versions: Vec<Version>,
    preferred_version: Option<Version>,
}

#[derive(Deserialize, PartialEq)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct Resources {
    resources: Vec<Resource>,
}

#[derive(Deserialize)]
struct Resource {
    name: String,
    kind: String,
    namespaced: bool,
    #[serde(default)]
    verbs: Vec<String>,
}

impl Client {
    /// Discovers all served kinds. The preferred version of a group comes first.
    pub async fn discover(&self) -> Result<ServerResources, Error> {
        let groups: Groups = self.read("/apis").await?;
        let mut group_versions = vec![(String::new(), "v1".to_owned())];
        for group in groups.groups {
            let mut versions = group.versions;
            if let Some(preferred) = group.preferred_version {
                versions.retain(|version| *version != preferred);
                versions.insert(0, preferred);
            }
            group_versions.extend(versions.into_iter().map(|version| (group.name.clone(), version.version)));
        }
        let fetch = |(group, version): (String, String)| async move {
            let path = match group.as_str() {
                "" => format!("/api/{version}"),
                group => format!("/apis/{group}/{version}"),
            };
            (group, version, self.read::<Resources>(&path).await)
        };
        let mut responses = iter(group_versions).map(fetch).buffered(MAX_CONCURRENT_REQUESTS);
        let mut server_resources = ServerResources::default();
        while let Some((group, version, response)) = responses.next().await {
            match response {
                Ok(response) => server_resources.add(&group, &version, response.resources),
                Err(error) => server_resources.failed.push((format!("{group}/{version}"), error)),
            }
        }
        Ok(server_resources)
    }

    /// The kinds of one group version, such as `apps/v1`.
    pub async fn resources_for_group_version(&self, api_version: &str) -> Result<Vec<ApiResource>, Error> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let root = if group.is_empty() { "/api" } else { "/apis" };
        let mut server_resources = ServerResources::default();
        server_resources.add(
            group,
            version,
            self.read::<Resources>(&format!("{root}/{api_version}")).await?.resources,
        );
        Ok(server_resources.kinds)
    }
}

impl ServerResources {
    fn add(&mut self, group: &str, version: &str, resources: Vec<Resource>) {
        for resource in resources.into_iter().filter(|resource| !resource.name.contains('/')) {
            let known = |other: &ApiResource| other.group == group && other.plural == resource.name;
            self.kinds.push(ApiResource {
                preferred: !self.kinds.iter().any(known),
                group: group.to_owned(),
                version: version.to_owned(),
                kind: resource.kind,
                plural: resource.name,
                namespaced: resource.namespaced,
                verbs: resource.verbs,
            });
        }
    }
}
